"""Import this before Megatron in tests that use Megatron without a run of megarl."""

import megarl

megarl.enable_cpu()
