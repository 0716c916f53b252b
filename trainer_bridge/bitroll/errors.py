"""The error of the library, for what needs no library: the programs that read other stacks' dumps run without one."""


class Error(RuntimeError):
    """A call of libbitroll that failed: its status and its sentence."""

    def __init__(self, status, sentence):
        super().__init__(sentence)
        self.status = status
