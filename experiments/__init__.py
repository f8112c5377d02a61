"""Entry points: parse flags, make a config, call the library."""
