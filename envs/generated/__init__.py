"""Problems that are made by a program, the same on every machine."""
