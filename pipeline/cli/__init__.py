"""What a user can type, and the exit status of each command.

One module per subcommand. May import every other package; heavy libraries only inside a command's function.
"""
