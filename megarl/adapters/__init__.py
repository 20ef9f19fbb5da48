"""megarl inside other people's training stacks: one module for each, which imports that stack and stands on the kit."""
