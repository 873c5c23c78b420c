"""Hooks of other libraries, each in a file of its own that imports its library when it is used."""
