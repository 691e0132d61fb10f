"""Models by their sizes, read from what people have, without torch: parameters exactly, operations by formula."""

from mycel.planning.models.hugging_face import from_hugging_face
from mycel.planning.models.json_format import ModelDescription, ModuleDescription, from_json
from mycel.planning.models.load import load_model, read_model
from mycel.planning.models.megatron import from_megatron, megatron_arguments, padded_vocab
from mycel.planning.models.shape import ModelShape
from mycel.planning.models.torchtitan import from_torchtitan, named

__all__ = [
    "ModelDescription",
    "ModelShape",
    "ModuleDescription",
    "from_hugging_face",
    "from_json",
    "from_megatron",
    "from_torchtitan",
    "load_model",
    "megatron_arguments",
    "named",
    "padded_vocab",
    "read_model",
]
