"""Compare evidence and interpret the outcome (paper, section 5).

Everything here is pure but for ``channel``; torch is imported only there and in the signature.
"""
