# SPDX-License-Identifier: Apache-2.0
"""The comparison of vLLM's logprobs with Hugging Face's, and the pytest plugin that asserts that they agree."""
