"""Files of other tuners, read and written as records."""
