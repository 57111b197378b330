"""The version, written down once: the package, its metadata and `decent-opt --version` all read it here."""

__version__ = "0.1.0"
