"""The one error a user is expected to be able to mend."""


class SomaError(ValueError):
    """Bad input: the message says what is wrong, where, and what to do.

    Commands print the message without a traceback and exit with status 2.
    """
