"""A model that learns visibly within minutes on two CPU cores."""
