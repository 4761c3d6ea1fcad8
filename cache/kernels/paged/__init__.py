"""Triton kernels of pools of K and V made one backend: steps for any head size, prompts where FlashInfer has none."""
