"""Train -> engine transfer of weights, with versions and proof of delivery."""
