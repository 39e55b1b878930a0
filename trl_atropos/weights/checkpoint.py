"""The weights of a checkpoint, into the model that goes on from it."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from trl_atropos.errors import CheckpointError

NAMED = 3  # weights that a message names


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: str) -> None:
    """
    Loads what `save_pretrained` has written, in place: parameters stay where they are.

    Transformers' own trainer takes the weights by the names in the files and passes over all others. Some families are
    saved under other names than those of their modules (GPT-NeoX' head; the experts of Mixtral and Qwen3-MoE, one by
    one), and would go on with the weights that the model began with. `from_pretrained` knows those names.

    Args:
        model: On any device, in any dtypes.
        folder: Of the checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, its weights cannot be read, or it lacks weights of the model or has
            them in other shapes.
    """
    if not Path(folder).is_dir():  # or `from_pretrained` would look for a model of that name on the Hub
        raise CheckpointError(
            f"There is no checkpoint in {folder}, which is no folder: check `resume_from_checkpoint`."
        )
    # float32 holds every dtype that is trained; `copy_` makes of it what it was.
    options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        saved, info = type(model).from_pretrained(folder, config=model.config, local_files_only=True, **options)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The weights of the checkpoint in {folder} cannot be read ({error}). It was damaged, or not written to "
            "the end: resume from another one (`resume_from_checkpoint`)."
        ) from error
    lacking = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if lacking:
        named = ", ".join(lacking[:NAMED]) + (f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else "")
        raise CheckpointError(
            f"The checkpoint in {folder} lacks weights of the model, or has them in other shapes: {named}. It is of "
            "another model, or was damaged: resume from another one (`resume_from_checkpoint`)."
        )
    model.load_state_dict(saved.state_dict())
