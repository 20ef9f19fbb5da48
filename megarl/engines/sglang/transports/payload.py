"""What a server reads a bucket from: its tensors in base64, or a handle of the memory that holds them."""

import base64
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megarl.engines.buckets import Bucket

Handle = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, which give a tensor where they are unpickled."""


class Rebuilt:
    """Is pickled as the result of a handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __reduce__(self) -> Handle:
        return self._handle


def payload_of(bucket: Bucket, flat: torch.Tensor | Rebuilt | None = None) -> str:
    """Base64 of the pickle that ``/update_weights_from_tensor`` takes as a "flattened_bucket".

    ``flat``: what gives the bucket's memory; None: the tensors themselves. SGLang only reads attributes of the
    metadata, and refuses to unpickle most classes. Plain namespaces with the attribute names of its own class work with
    all releases.
    """
    places = [
        SimpleNamespace(name=name, shape=list(shape), dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
        for name, dtype, shape, start, end in bucket.places()
    ]
    # A copy, because a slice would be pickled with all of its storage.
    content = {"flattened_tensor": bucket.on_host().flat.clone() if flat is None else flat, "metadata": places}
    return base64.b64encode(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)).decode()
