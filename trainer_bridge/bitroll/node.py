"""A node of autograd's graph, where there is one."""
import torch
from torch.autograd import Function


class Unkept:
    """The context of an op that nothing is differentiated through: it keeps nothing."""

    def save_for_backward(self, *_):
        pass

    def mark_non_differentiable(self, *_):
        pass

    def __setattr__(self, *_):
        pass


UNKEPT = Unkept()


class Op(Function):
    """One op and its gradient."""

    @classmethod
    def run(cls, *args):
        """As Function.apply, without its preparation for functorch, a third of its time, and without a node where none is asked for."""
        return super(Function, cls).apply(*args) if torch.is_grad_enabled() else cls.forward(UNKEPT, *args)
