"""Followers of a run that tests need."""


class OnRound:
    """Calls a function after every round: to stop a run there, say."""

    def __init__(self, function):
        self.function = function

    def begin(self, start): ...

    def add(self, done):
        self.function(done)

    def end(self, status): ...
