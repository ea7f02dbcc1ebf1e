"""Reads an ensemble that launch/export.py has written into torch.nn.LSTM modules.

python examples/torch_reader.py --directory=exported --text="The people of the United States"

prints the most probable next byte under the mean of all its experts. It needs torch and safetensors
and nothing else. An expert is a file of float32 tensors, named as in soma_jax/model.py (matrices
are [inputs, outputs]); config.json has its shape.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import gelu, layer_norm


class Expert(torch.nn.Module):
    """Bytes [B, T] to next-byte logits [B, T, 256] (paper, section 1)."""

    def __init__(self, tensors: dict[str, torch.Tensor], width: int, blocks: int):
        super().__init__()
        self.tensors, self.width = tensors, width
        self.lstms = torch.nn.ModuleList(
            torch.nn.LSTM(width, width, bias=False, batch_first=True) for _ in range(blocks)
        )
        for index, lstm in enumerate(self.lstms):
            # Both order the gates input, forget, candidate, output; torch keeps [outputs, inputs].
            block = f"body.blocks.{index}.lstm"
            lstm.weight_ih_l0.data = tensors[f"{block}_input"].T.contiguous()
            lstm.weight_hh_l0.data = tensors[f"{block}_recurrent"].T.contiguous()
            lstm.flatten_parameters()

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = self.tensors
        x = at["head"][ids]
        if "body.input_projection" in at:
            x = x @ at["body.input_projection"]
        for index, lstm in enumerate(self.lstms):
            block = f"body.blocks.{index}"
            x = x + lstm(layer_norm(x, (self.width,), at[f"{block}.lstm_gain"]))[0]
            hidden = layer_norm(x, (self.width,), at[f"{block}.mlp_gain"]) @ at[f"{block}.mlp_in"]
            x = x + gelu(hidden) @ at[f"{block}.mlp_out"]
        x = layer_norm(x, (self.width,), at["body.final_gain"])
        if "body.output_projection" in at:
            x = x @ at["body.output_projection"]
        return x @ at["head"].T


def read(directory: Path) -> list[Expert]:
    """The experts of an exported ensemble, in order."""
    shape = json.loads((directory / "config.json").read_text())["model"]
    files = sorted((directory / "experts").glob("*.safetensors"))
    return [Expert(load_file(file), shape["width"], shape["blocks"]) for file in files]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--text", default="The people of the United States")
    arguments = parser.parse_args()
    ids = torch.tensor([list(arguments.text.encode())])
    p = torch.stack([expert(ids)[0, -1].softmax(-1) for expert in read(arguments.directory)])
    print(bytes([int(p.mean(0).argmax())]))
