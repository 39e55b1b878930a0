"""Makes a model's parameters views of another process's memory, after checking that they hold the same values."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trl_atropos.errors import AttachError
from trl_atropos.protocol import Attachment, View
from trl_atropos.transport import open_storage


@dataclass
class OpenedViews:
    """The server's memory, seen as the parameters of a model. `views`: by parameter name; `refused`: why not."""

    views: dict[str, torch.Tensor]
    refused: dict[str, str]


def open_views(parameters: Iterable[tuple[str, torch.Tensor]], attachment: Attachment) -> OpenedViews:
    """
    Opens the server's memory and compares it, bit for bit, with the values that the trainer has loaded.

    A parameter that vLLM transforms after loading differs and is refused. If most do, the server has other weights,
    and that is an error.

    Raises:
        AttachError: The server has other weights, or what it says cannot be.
    """
    storages = [open_storage(handle) for handle in attachment.storages]
    opened = OpenedViews({}, dict(attachment.refused))
    differing = []
    for name, parameter in parameters:
        if name in opened.refused:
            continue
        view = _open_view(name, parameter, attachment.views[name], storages)
        if torch.equal(view, parameter.detach().to(view.device)):
            opened.views[name] = view
        else:
            differing.append(name)
    if len(differing) > len(opened.views):
        raise AttachError(
            f"The server's weights differ from the trainer's model at {differing[0]!r}. Either the server serves "
            "another model or another checkpoint, or a former run has trained it: start it again on the model that "
            "the trainer loads."
        )
    opened.refused |= dict.fromkeys(differing, "vLLM transforms it after loading, or has another value")
    return opened


def _open_view(name: str, parameter: torch.Tensor, place: View, storages: list[torch.Tensor]) -> torch.Tensor:
    """Checks the place that the server named before it is used as an address."""
    if place.dtype != str(parameter.dtype).removeprefix("torch.") or place.size != list(parameter.shape):
        raise AttachError(f"The server describes {name!r} as {place.dtype} {place.size}, which is not the trainer's.")
    flat = storages[place.storage].view(parameter.dtype)
    span = sum((size - 1) * stride for size, stride in zip(place.size, place.stride, strict=True)) + 1
    if place.offset < 0 or min(place.stride, default=0) < 0 or place.offset + span > flat.numel():
        raise AttachError(f"The server's place for {name!r} lies outside of its memory.")
    return flat.as_strided(place.size, place.stride, place.offset)


def replace(model: torch.nn.Module, views: dict[str, torch.Tensor]) -> None:
    """Puts the views in place of the parameters, everywhere a tied parameter is used."""
    replacements = {
        id(parameter): torch.nn.Parameter(views[name], requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, leaf, replacements[id(parameter)])
    model.register_state_dict_post_hook(_make_contiguous)


def _make_contiguous(model: torch.nn.Module, state_dict: dict, prefix: str, metadata: dict) -> None:
    """Saving knows no transposed views (GPT-2's linear layers are): such weights leave the model as copies."""
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            state_dict[name] = value.contiguous()


def detached(model: torch.nn.Module, views: dict[str, torch.Tensor]) -> list[str]:
    """Names of the parameters that are no longer the server's memory."""
    present = {parameter.data_ptr() for parameter in model.parameters()}
    return [name for name, view in views.items() if view.data_ptr() not in present]
