"""Low-rank matrices beside the frozen weights of an encoder, by peft.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from cloze.export.train.folder import Folder
from cloze.export.train.recipe import LowRank, Target

_TARGETS: Final[Mapping[Target, str]] = {
    "query": "query|query_proj|q_lin|q|q_proj|Wqkv|qkv_proj",
    "key": "key|key_proj|k_lin|k|k_proj|Wqkv|qkv_proj",
    "value": "value|value_proj|v_lin|v|v_proj|Wqkv|qkv_proj",
    "attention-output": r"attention\.output\.dense|attention\.dense|out_lin|o|o_proj|attn\.Wo",
    "feed-forward-in": r"intermediate\.dense|ffn|lin1|mlp\.Wi|up_proj|gate_proj|up_gate_proj",
    "feed-forward-out": r"(?<!attention\.)output\.dense|ffn_output|lin2|mlp\.Wo|down_proj",
}
"""Targets, and the ends of the names of transformers' layers, in all families."""

_TASKS: Final = {
    "ForSequenceClassification": TaskType.SEQ_CLS,
    "ForTokenClassification": TaskType.TOKEN_CLS,
    "ForQuestionAnswering": TaskType.QUESTION_ANS,
}
"""peft's names of tasks, by the end of the model's class; an encoder extracts features."""


def add_low_rank(model: PreTrainedModel, recipe: LowRank, source: Folder) -> PeftModel:
    """Freeze the encoder of a model, and give layers of it low-rank matrices."""
    ends = "|".join(_TARGETS[target] for target in recipe.targets)
    pattern = re.compile(rf".*\.\d+\.(.*\.)?({ends})")
    linears = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    base, heads = model.base_model, []
    if base is not model:
        heads = [
            name
            for name, child in model.named_children()
            if child is not base and any(True for _ in child.parameters())
        ]
        heads += ["pooler"] if getattr(base, "pooler", None) is not None else []
    kind = next((task for end, task in _TASKS.items() if type(model).__name__.endswith(end)), None)
    location = source.location if source.revision is not None else str(source.path.resolve())
    model.name_or_path = location  # peft writes this as the adapter's base
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,  # type: ignore[arg-type]  # peft divides it, whatever it is
        target_modules=[name for name in linears if pattern.fullmatch(name)],
        modules_to_save=heads or None,
        task_type=kind or TaskType.FEATURE_EXTRACTION,
        base_model_name_or_path=location,
        revision=source.revision,
    )
    with warnings.catch_warnings():  # peft asks transformers by a name that is deprecated
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted: Any = get_peft_model(model, config)
    return adapted  # type: ignore[no-any-return]


def save_settings(model: PeftModel, folder: Path) -> None:
    """Write the ``config.json`` of an adapter with heads, whose labels an export reads."""
    network: Any = model.get_base_model()
    if network.base_model is not network:
        network.config.architectures = [type(network).__name__]
        network.config.save_pretrained(folder)
