"""Tensors on their way out of torch: checked and in order, written by now, in one block, or in the host's memory."""
import torch


def in_order(shapes, tensors):
    """The tensors of a manifest's names, in its order, where they lie; one that is in one piece already is not copied."""
    if set(shapes) != set(tensors):
        raise KeyError(f"{len(tensors)} tensors: the engine's adapter has {len(shapes)}, not in both: {sorted(set(shapes) ^ set(tensors))[:3]}")
    for key, shape in shapes.items():
        if tensors[key].dtype != torch.bfloat16 or tuple(tensors[key].shape) != shape:
            raise ValueError(f"{key}: {tensors[key].dtype} {tuple(tensors[key].shape)}: expected torch.bfloat16 {shape}")
    return [tensors[key].detach().contiguous() for key in shapes]


def settled(values):
    """The same, once what torch has under way on a GPU has written them: others read on streams of their own."""
    for device in {value.device for value in values if value.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return values


def block_of(values):
    """All values one behind the other in one block of memory, where all lie on a GPU; else None."""
    if not values or not all(value.is_cuda for value in values):
        return None
    return settled([torch.cat([value.reshape(-1) for value in values])])[0]


def on_host(values, block=None):
    """The values in the host's memory; those of a GPU's block by one copy."""
    if block is None:
        block = block_of(values)
    if block is None:
        return [value.cpu() for value in values]
    parts = block.cpu().split([value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values)]


def each_on_host(tensors):
    """Tensors by their names, of any types, in the host's memory; one that is there in one piece already is not copied."""
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
