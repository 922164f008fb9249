"""The task declarations: tasks/<category>/<name>.py, one a file."""
