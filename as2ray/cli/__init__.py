"""The `as2ray` command, one file per subcommand. No logic of its own."""
