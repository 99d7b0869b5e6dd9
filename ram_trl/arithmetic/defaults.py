"""What holds unless a user says otherwise, without the import of torch."""

__all__ = ["DEFAULT_EPSILON", "RESCALING"]

# Paper, section 5.1: a parameter counts as changed when it differs from the base by more than this.
DEFAULT_EPSILON = 1e-5

# The methods that r and alpha are options of.
RESCALING = ("ram_plus", "ram", "ram_plus_soft")
