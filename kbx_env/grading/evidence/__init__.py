"""Evidence that Triton did the work, and how it is added up."""
