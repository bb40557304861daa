"""The benchmarks by name: which functions measure, what is shown of the rows that they return."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.kernel_groups import GROUPS


@dataclass(frozen=True)
class Benchmark:
    """Which functions measure, what its table shows, and what its picture is about."""

    functions: tuple[str, ...] = ("measure",)
    columns: tuple[str, ...] = ()  # of the table; all of them if none are named
    ratio: str = "of_copy"
    reference: str = "rate, 1 = device-to-device copy in the same process"
    on_cpu: bool = False  # whether a reduced run on a CPU says anything
    shows_cpu: bool = False  # whether its figures mean something, and are shown


#: By the module's name. A measuring function takes no argument and returns rows: dicts with a "case".
BENCHMARKS = {
    "gemm": Benchmark(
        columns=("case", "mode", "shape", "us", "TFLOP/s", "torch_us", "of_torch", "of_cublaslt", "of_tensor",
                 "target", "ok"),
        ratio="of_torch", reference="speed, 1 = torch's call of the same library", on_cpu=True,
    ),
    "norms": Benchmark(
        ("device_times", "host_times"),
        columns=("case", "shape", "dtype", "us", "of_copy", "of_linear", "TB/s"),
    ),
    "quantize": Benchmark(
        ("measure_device", "measure_host"),
        columns=("case", "shape", "us", "of_copy", "clean_us", "clean_of_copy"),
    ),
    "modules": Benchmark(
        columns=("case", "recipe", "fwd us", "fwd+bwd us", "peak MiB", "peer fwd us", "peer fwd+bwd us",
                 "peer peak MiB", "of_peer", "of_linear fwd", "of_linear", "target", "ok"),
        ratio="of_peer", reference="fwd+bwd GPU time, 1 = the peer on an H200", on_cpu=True,
    ),
    "attention": Benchmark(
        ("measure", "measure_torch", "measure_start"),
        columns=("case", "recipe", "fwd us", "fwd+bwd us", "peak MiB", "peer fwd us", "peer fwd+bwd us",
                 "peer peak MiB", "of_peer", "of_linear fwd", "of_linear", "of_torch", "seconds", "plans built",
                 "target", "ok"),
        ratio="of_peer", reference="fwd+bwd GPU time, 1 = the peer on an H200", on_cpu=True,
    ),
    "rivals": Benchmark(
        columns=("case", "recipe", "fwd+bwd us", "peak MiB", "of_compiled"), ratio="of_compiled",
        reference="fwd+bwd GPU time, 1 = torch's layer under torch.compile in the same process", on_cpu=True,
    ),
    "host": Benchmark(
        columns=("case", "recipe", "fwd us", "fwd+bwd us", "of_linear fwd", "of_linear", "target", "ok"),
        ratio="of_linear", reference="host time, 1 = torch.nn.Linear in the same process", on_cpu=True,
    ),
    "replay": Benchmark(
        columns=("case", "recipe", "interpreted fwd us", "interpreted fwd+bwd us", "fwd us", "fwd+bwd us",
                 "interpreted of_linear fwd", "interpreted of_linear", "of_linear fwd", "of_linear", "us",
                 "us a module", "interpreted peak MiB", "peak MiB", "equal", "reproducible", "share", "reasons",
                 "target", "ok"),
        ratio="of_interpreted", reference="time of forward and backward, 1 = interpreted in the same process",
    ),
    "players": Benchmark(
        columns=("case", "recipe", "python fwd us", "c fwd us", "of_python fwd", "python fwd+bwd us", "c fwd+bwd us",
                 "of_python fwd+bwd", "python peak MiB", "c peak MiB", "equal", "ok"),
        ratio="of_python fwd+bwd", reference="host time of forward and backward, 1 = TE_CORE_PLAYER=python",
    ),
    "end_to_end": Benchmark(
        columns=("case", "recipe", "parts", "ms", "of_torch's", "of_before", "tokens/s", "MFU", "peak GiB", "held GiB",
                 "predicted GiB", "first loss", "last loss", *GROUPS, "target", "ok"),
        ratio="of_torch's", reference="milliseconds of kernels in a step", on_cpu=True,
    ),
    "graphs": Benchmark(
        columns=("case", "recipe", "eager wall us", "wall us", "eager events us", "events us", "eager gpu us",
                 "gpu us", "of_eager"),
        ratio="of_eager", reference="time of a step, 1 = the same step eagerly in the same process",
    ),
    "recompute": Benchmark(
        columns=("case", "recipe", "kept MiB", "bytes an element", "fwd+bwd us", "of_keeping"),
        ratio="of_keeping", reference="fwd+bwd speed, 1 = everything kept", on_cpu=True,
    ),
    "compiled": Benchmark(
        columns=("case", "recipe", "eager us", "compiled us", "graphs us", "of_eager", "target", "ok"),
        ratio="of_eager", reference="host time of a step, 1 = eager in the same process", on_cpu=True,
    ),
    "attention_kernels": Benchmark(columns=("case", "shape", "us", "of_copy", "TB/s")),
    "loss": Benchmark(
        ("measure", "measure_heads"),
        columns=("case", "shape", "us", "of_copy", "TB/s", "peak MiB", "of_apart", "target", "ok"),
    ),
    "padding": Benchmark(
        columns=("case", "gpu us", "host us", "of_plain", "of_plain host"),
        ratio="of_plain", reference="time of forward and backward, 1 = without padding in the same process",
    ),
    "optimizer": Benchmark(
        ("measure", "measure_quantized"),
        columns=("case", "ms", "torch ms", "TB/s", "of_copy", "host us", "target", "ok"), on_cpu=True,
    ),
    "chains": Benchmark(
        columns=("case", "recipe", "host us", "of_module host", "gpu us", "of_module"), ratio="of_module",
        reference="GPU time of forward and backward, 1 = LayerNormMLP in the same process",
    ),
    "experts": Benchmark(
        columns=("case", "scaling", "recipe", "shape", "us", "torch_us", "of_torch", "of_dense", "wall us", "gpu us",
                 "TFLOP/s", "target", "ok"),
        ratio="of_torch", reference="speed, 1 = torch's grouped product in the same process",
    ),
    "moe": Benchmark(columns=("case", "shape", "us", "of_copy", "TB/s", "target", "ok")),
    "offload": Benchmark(
        columns=("case", "recipe", "ms", "offloaded ms", "of_plain", "MiB away", "held MiB", "offloaded held MiB",
                 "held less", "peak MiB", "offloaded peak MiB", "copy ms", "behind ms", "overlap", "target", "ok"),
        ratio="of_plain", reference="fwd+bwd GPU time, 1 = without offloading in the same process",
    ),
    "sharded": Benchmark(
        columns=("case", "recipe", "bf16 ms", "ms", "of_bf16", "bf16 gathered MiB", "gathered MiB", "of_bytes",
                 "target", "ok"),
        ratio="of_bf16", reference="time of a step, 1 = bf16 weights in the same processes", on_cpu=True,
    ),
    "sharded_host": Benchmark(
        columns=("case", "recipe", "bf16 host ms", "host ms", "of_bf16_host", "bf16 ms", "ms", "of_bf16"),
        ratio="of_bf16", reference="time of a step, 1 = bf16 weights in the same process", on_cpu=True,
    ),
    "parallel": Benchmark(
        columns=("case", "recipe", "ranks", "one ms", "ms", "speed-up", "communication ms", "hidden", "MiB a step",
                 "nccl us", "one_shot us", "two_shot us"),
        ratio="speed-up", reference="fwd+bwd speed, 1 = one GPU with the whole layer", on_cpu=True,
    ),
    "four": Benchmark(
        columns=("case", "recipe", "mode", "ranks", "ms", "speed-up", "communication ms", "hidden", "predicted ms",
                 "of_predicted", "failed"),
        ratio="speed-up", reference="tokens a second, 1 = one GPU", on_cpu=True,
    ),
    "overlap": Benchmark(
        columns=("case", "recipe", "method", "plain ms", "ms", "of_plain", "plain shown ms", "shown ms",
                 "plain idle ms", "idle ms", "M, K, N", "whole ms", "halves ms", "copy ms", "halves and copy ms"),
        ratio="of_plain", reference="fwd+bwd time, 1 = without overlap in the same processes", on_cpu=True,
    ),
    "overlap_defaults": Benchmark(
        columns=("case", "recipe", "method", "carrier", "plain ms", "ms", "of_plain", "plain shown ms", "shown ms",
                 "plain idle ms", "idle ms"),
        ratio="of_plain", reference="fwd+bwd time, 1 = without overlap in the same processes", on_cpu=True,
    ),
    "overlap_captured": Benchmark(
        columns=("case", "recipe", "method", "eager ms", "ms", "of_eager"),
        ratio="of_eager", reference="fwd+bwd time, 1 = the eager step in the same processes",
    ),
    "debugging": Benchmark(
        ("measure_inspect", "measure_features"),
        columns=("case", "us", "of_plain", "host us", "more us", "target", "ok"),
        ratio="of_plain", reference="fwd+bwd time, 1 = the plain FP8 step in the same process", on_cpu=True,
    ),
    "endurance": Benchmark(
        columns=("case", "steps", "resident MiB", "torch MiB", "reserved MiB", "Python blocks", "tapes", "share",
                 "of_middle", "target", "ok"),
        ratio="of_middle", reference="what is held, 1 = the median of the middle third", on_cpu=True, shows_cpu=True,
    ),
    "training": Benchmark(
        columns=("case", "recipe", "seed", "last loss", "of_bf16", "held-out loss", "below unigram", "seconds", "ok"),
        ratio="of_bf16", reference="training loss, 1 = bf16", on_cpu=True,
    ),
}  # fmt: skip
