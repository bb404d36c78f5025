"""What a user can type, and the exit status of each command. Heavy libraries are imported inside of functions only."""
