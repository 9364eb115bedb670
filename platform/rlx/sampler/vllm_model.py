"""What rlx runs inside vLLM, in every process that holds a part of a model."""

from typing import Any

from torch import nn

from rlx.sampler.transfer import read_weight_file

__all__ = ["reload_from_file", "repack_matrices"]


def reload_from_file(worker: Any, path: str) -> None:
    """Reloads the part of the weights that a process of vLLM holds.

    Args:
        worker: vLLM's worker of that process.
        path: a file of all weights, which it can open.
    """
    worker.reload_weights(weights_iterator=read_weight_file(path))


def repack_matrices(model: nn.Module) -> None:
    """Repacks the matrices of tied embeddings and of experts.

    On the CPU, vLLM multiplies with packed copies of matrices. Reloading repacks those of linear
    layers, but not an output layer that is tied to the embeddings, whose logits would remain those
    of the old weights, nor the experts of a mixture, which would be read as if they were packed.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
