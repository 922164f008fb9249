"""What a task declares: inputs, criteria, costs; and the catalog that finds the declarations."""
