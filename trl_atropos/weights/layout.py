"""Makes a model's parameters views of another process's memory, after checking that they hold the same values."""

import torch

from trl_atropos.errors import AttachError
from trl_atropos.protocol import Attachment, ParameterSpec, View
from trl_atropos.transport import open_storage


def specs_of(model: torch.nn.Module) -> list[ParameterSpec]:
    """One entry per parameter, tied ones once."""
    return [
        ParameterSpec(name=name, shape=list(parameter.shape), dtype=str(parameter.dtype).removeprefix("torch."))
        for name, parameter in model.named_parameters()
    ]


def attach(model: torch.nn.Module, attachment: Attachment) -> dict[str, torch.Tensor]:
    """
    Replaces every parameter of `model` by a view of the server's memory. Returns the views by parameter name.

    Nothing is replaced unless every parameter has a view that holds, bit for bit, the values that the model was loaded
    with. That is what finds a server of another checkpoint, and weights that vLLM transforms after loading.
    """
    if attachment.refused:
        raise AttachError(_refused_message(attachment.refused))
    storages = [open_storage(handle) for handle in attachment.storages]
    views: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        view = _open_view(name, parameter, attachment.views[name], storages)
        if not torch.equal(view, parameter.detach().to(view.device)):
            raise AttachError(
                f"The server's weights differ from the trainer's model at {name!r}. Either the server serves another "
                "model or another checkpoint, or a former run has trained it: start it again on the model that the "
                "trainer loads. If it is the same checkpoint, vLLM transforms this weight after loading, and the "
                "architecture cannot be trained in place."
            )
        views[name] = view
    _replace(model, views)
    model.register_state_dict_post_hook(_make_contiguous)
    return views


def _open_view(name: str, parameter: torch.nn.Parameter, place: View, storages: list[torch.Tensor]) -> torch.Tensor:
    """Checks the place that the server named before it is used as an address."""
    if place.dtype != str(parameter.dtype).removeprefix("torch.") or place.size != list(parameter.shape):
        raise AttachError(f"The server describes {name!r} as {place.dtype} {place.size}, which is not the trainer's.")
    flat = storages[place.storage].view(parameter.dtype)
    span = sum((size - 1) * stride for size, stride in zip(place.size, place.stride, strict=True)) + 1
    if place.offset < 0 or min(place.stride, default=0) < 0 or place.offset + span > flat.numel():
        raise AttachError(f"The server's place for {name!r} lies outside of its memory.")
    return flat.as_strided(place.size, place.stride, place.offset)


def _replace(model: torch.nn.Module, views: dict[str, torch.Tensor]) -> None:
    """Puts the views in place of the parameters, everywhere a tied parameter is used."""
    replacements = {
        id(parameter): torch.nn.Parameter(views[name], requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, leaf, replacements[id(parameter)])


def _make_contiguous(model: torch.nn.Module, state_dict: dict, prefix: str, metadata: dict) -> None:
    """Saving knows no transposed views (GPT-2's linear layers are): such weights leave the model as copies."""
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            state_dict[name] = value.contiguous()


def detached(model: torch.nn.Module, views: dict[str, torch.Tensor]) -> list[str]:
    """Names of the parameters that are no longer the server's memory."""
    return [
        name
        for name, parameter in model.named_parameters()
        if name not in views or parameter.data_ptr() != views[name].data_ptr()
    ]


def _refused_message(refused: dict[str, str]) -> str:
    shown = [f"{name}: {reason}" for name, reason in list(refused.items())[:3]]
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    return (
        f"{len(refused)} parameters of this architecture cannot be views of vLLM's memory, so it cannot be trained "
        f"with vllm_mode='colocate' ({'; '.join(shown)}{more}). Use another model."
    )
