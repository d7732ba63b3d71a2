"""`ChainDecoder`, the name of `DecodeSession` before it decoded trees, for programs that import it."""

from draftline.decode.session import DecodeSession as ChainDecoder

__all__ = ["ChainDecoder"]
