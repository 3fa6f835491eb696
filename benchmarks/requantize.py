"""The model of a GGUF file with its matrices in another type, so that both engines read one file.

    python benchmarks/requantize.py SmolLM2.Q4_1.gguf SmolLM2.Q8_0.gguf --type Q8_0

Everything but the matrices is copied as it is. Weights go by way of bfloat16: a file written with
`--type BF16` has the numbers of a bfloat16 folder that was made of the first file.
"""

import argparse

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

TYPES = ("BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_FILE_TYPES = {"BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16"} | {
    name: f"MOSTLY_{name}" for name in TYPES if name.startswith("Q")
}


def rounded(weight: np.ndarray) -> np.ndarray:
    """To the nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(weight, np.float32).view(np.uint32)
    near = bits + 0x7FFF + ((bits >> 16) & 1)
    return (near & np.uint32(0xFFFF0000)).view(np.float32)


def rewrite(source: str, target: str, name: str) -> None:
    """Write `target`: the file `source` with its matrices in the type `name`."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (
            "general.architecture",
            "general.file_type",
        ):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    writer.add_file_type(getattr(gguf.LlamaFileType, _FILE_TYPES[name]))
    wanted = gguf.GGMLQuantizationType[name]
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) < 2:  # norms and biases
            writer.add_tensor(tensor.name, numbers.astype(np.float32))
        else:
            writer.add_tensor(tensor.name, quantize(rounded(numbers), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Read two names and a type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--type", choices=TYPES, required=True)
    asked = parser.parse_args()
    rewrite(asked.source, asked.target, asked.type)


if __name__ == "__main__":
    main()
