# SPDX-License-Identifier: Apache-2.0
"""What this package costs: every figure against its peer, measured in turn in the same run."""
