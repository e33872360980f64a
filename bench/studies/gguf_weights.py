"""Writes a Hugging Face folder of a BERT as ``llama-q8_0.gguf``: python gguf_weights.py FOLDER."""

import json
import sys
from pathlib import Path

import gguf
from safetensors.numpy import load_file


def write_gguf(folder: Path, file: Path) -> None:
    """Write matrices in Q8_0, all else in float32, and no words: texts come as token ids."""
    config, bert = json.loads((folder / "config.json").read_text()), gguf.MODEL_ARCH.BERT
    names = gguf.get_tensor_name_map(bert, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(str(file), "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([f"\u2581{number}" for number in range(config["vocab_size"])])
    writer.add_token_type_count(config["type_vocab_size"])
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for theirs, values in load_file(folder / "model.safetensors").items():
        name = names.get_name(theirs.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        if name is None or "pooler" in theirs:
            continue
        if values.ndim == 2 and "position" not in theirs and "token_type" not in theirs:
            writer.add_tensor(name, gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


write_gguf(Path(sys.argv[1]), Path(sys.argv[1]) / "llama-q8_0.gguf")
