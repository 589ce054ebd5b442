"""Built-in loggers: a file NAME.py for each ``logger.backend=NAME``, and what finds them."""
