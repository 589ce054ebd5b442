"""The page of a run, ``report.html``: what the run gained, its curves and its responses, in one file or live."""
