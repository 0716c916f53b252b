"""The rollout engine in another process: bitroll-worker behind the bridge, over a UNIX socket or MPI."""
from .connection import Busy, Lost, Refused
from .remote_texts import Texts
from .remote_weights import Weights

__all__ = ["Busy", "Lost", "Refused", "Remote"]


class Remote(Texts, Weights):
    """What in_process.Engine is in this process, of a worker; arguments are those of Weights and Connection."""
