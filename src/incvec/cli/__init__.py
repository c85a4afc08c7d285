"""The command line. Each command, or group of commands, has its own module with a function `register(app)`."""
