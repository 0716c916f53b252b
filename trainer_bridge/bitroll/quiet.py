"""What Megatron-Core says of itself wherever this trainer runs: of packages that it can do without, and of its own parts that this trainer means
to use. Left out by its text; whatever else it or anybody says is heard."""
import contextlib
import logging
import re
import warnings

WARNINGS = ("Transformer Engine and Apex are not installed. Falling back to ", "Apex is not installed. Falling back to Torch Norm",
            "absl.logging is not installed. Using logging.getLogger(__name__) instead.",
            # of torch, which Megatron calls when it loads a checkpoint
            "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to load in a single process.",
            "The argument order of load has been changed.")  # how they begin
LOGGED = {  # by logger; torch's is asked for its place of CUDA, and refusals.machine says whether a GPU is missed
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED. ",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated ",
    "torch.utils.cpp_extension": "No CUDA runtime is found, using CUDA_HOME="}


def _is_news(record):
    """By the text as it stands in the source: one that its arguments do not fit is logging's to complain of, not the caller's to fail with."""
    return record.name not in LOGGED or not str(record.msg).startswith(LOGGED[record.name])


@contextlib.contextmanager
def known():
    """Around its imports and its load of a checkpoint. What it logs comes when a model is built and a checkpoint written: that is left out from
    now on."""
    for name in LOGGED:
        logging.getLogger(name).addFilter(_is_news)
    with warnings.catch_warnings():
        for text in WARNINGS:
            warnings.filterwarnings("ignore", re.escape(text), UserWarning, r"(megatron\.core|torch\.distributed\.checkpoint)\.")
        yield
