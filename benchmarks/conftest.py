"""What pytest leaves alone here."""

# Scripts of their own, with peers that tests do not install.
collect_ignore_glob = ["*/*.py", "import_time.py"]
