"""What a processor without a GPU needs: vLLM's own NVFP4 emulation, and shims for faults that no GPU user meets.

Each shim looks for the fault itself, not for a version number, and reports that it was used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from . import report


def is_cpu() -> bool:
    """Whether this server computes on the processor."""
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())


def install() -> None:
    """Register the emulation kernel and put every shim that this version needs in place."""
    _emulate_linear()
    _memory_info()
    _relink_sampler()
    _drafter()
    from . import experts

    experts.install()


def _emulate_linear() -> None:
    """NVFP4 linears through the reference arithmetic that vLLM itself ships for hardware without FP4."""
    platform = importlib.import_module("vllm.platforms").PlatformEnum.CPU
    linear = _import("vllm.model_executor.kernels.linear")
    kernel = getattr(linear, "EmulationNvFp4LinearKernel", None)
    register = getattr(linear, "register_linear_kernel", None)
    if kernel is None or register is None:
        return
    if kernel not in getattr(linear, "_POSSIBLE_NVFP4_KERNELS", {}).get(platform, []):
        register(kernel, platform, "nvfp4")
    report.shim("nvfp4-emulation", "no NVFP4 kernel is registered for processors")


def _memory_info() -> None:
    """Some releases ask the CPU platform for a method that it does not have."""
    platform = getattr(_import("vllm.platforms.cpu"), "CpuPlatform", None)
    if platform is None or callable(getattr(platform, "mem_get_info", None)):
        return
    psutil = importlib.import_module("psutil")

    def mem_get_info(cls: type, *_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    platform.mem_get_info = classmethod(mem_get_info)


def _relink_sampler() -> None:
    """The processor's stand-ins for Triton kernels: put where the sampler looks, and blind to keywords of Triton."""
    stand_ins = _import("vllm.utils.cpu_triton_utils")
    if stand_ins is None:
        return
    for name in dir(stand_ins):
        wrapper = getattr(stand_ins, name)
        if type(wrapper).__name__ == "_FuncWrapper":
            wrapper.func = _without_unknown_keywords(wrapper.func)
    for module_name in (
        "vllm.v1.sample.rejection_sampler",
        "vllm.v1.spec_decode.utils",
        "vllm.v1.spec_decode.llm_base_proposer",
    ):
        module = _import(module_name)
        for value in list(vars(module).values()) if module else ():
            kernel = None if isinstance(value, type) else getattr(value, "kernel", None)
            if inspect.isfunction(kernel) and hasattr(stand_ins, kernel.__name__):
                value.kernel = getattr(stand_ins, kernel.__name__)
                report.shim("sampler-kernels", "the sampler's launchers name Triton kernels on a processor too")


def _without_unknown_keywords(function: Any) -> Any:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        known = {name: value for name, value in kwargs.items() if name in parameters}
        if len(known) != len(kwargs):
            report.shim("sampler-keywords", "the sampler passes keywords that the processor's kernel does not take")
        return function(*args, **known)

    return call


def _drafter() -> None:
    module = _import("vllm.v1.spec_decode.gemma4")
    proposers: list[Any] = [value for value in vars(module).values() if isinstance(value, type)] if module else []
    for proposer in proposers:
        if hasattr(proposer, "_setup_centroids_cuda_graphs"):
            proposer._setup_centroids_cuda_graphs = _no_cuda_graphs
        if "_setup_gemma4_kv_sharing" in vars(proposer):
            proposer._setup_gemma4_kv_sharing = _share_kv(proposer._setup_gemma4_kv_sharing)


def _no_cuda_graphs(self: Any) -> None:
    report.shim("centroids-without-cuda-graphs", "ordered embeddings are captured as CUDA graphs")


def _share_kv(original: Any) -> Any:
    """Up to 0.24 the processor's attention writes the drafter's own, never set K and V into the body's cache."""
    tested = "self.kv_sharing_target_layer_name is None"

    @functools.wraps(original)
    def setup(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            target = getattr(layer, "kv_sharing_target_layer_name", None)
            impl: Any = getattr(layer, "impl", None)
            unset = getattr(impl, "kv_sharing_target_layer_name", "no such thing") is None
            if target and unset and tested in inspect.getsource(type(impl)):
                impl.kv_sharing_target_layer_name = target
                report.shim("drafter-kv-sharing", "the processor's attention would overwrite the body's K and V")
        return result

    return setup


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError):
        return None
