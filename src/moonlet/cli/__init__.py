"""The ``moonlet`` command: one thin file per subcommand, imported when it is used."""
