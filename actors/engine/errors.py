"""The error for mistakes that a user can correct; any other exception is a defect or a failure."""


class UserError(ValueError):
    """A wrong configuration or input. Its message is one line that names the key, file or row and the remedy."""
