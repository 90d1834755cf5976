"""Hugging Face checkpoints: what was trained comes out as one, and a converted model starts from one, or from random values.

    export(model, optimizer, "folder", format="fp8")            then AutoModelForCausalLM.from_pretrained("folder")
    model, optimizer = load_pretrained("folder", "O3-split", make_optimizer=lambda model: AdamW(model.parameters()))
    model, optimizer = draw_model(lambda: LlamaForCausalLM(config), "O3-split", make_optimizer=…)    then parallelize

A folder holds `config.json` and safetensors files: plain values, or FP8 weights in the form of compressed-tensors.
"""

from octet.worker.pretrained.calibrate import Calibration
from octet.worker.pretrained.draw import draw_model
from octet.worker.pretrained.load import load_pretrained
from octet.worker.pretrained.write import export

__all__ = ["Calibration", "draw_model", "export", "load_pretrained"]
