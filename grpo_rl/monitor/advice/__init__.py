"""The conditions under which a run is given an advisory."""
