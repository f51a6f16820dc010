"""A grouped GEMM in Triton that counts which of its paths ran."""
