"""megarl inside other stacks, one file for each: its objectives as that stack's loss, and the routing watch."""
