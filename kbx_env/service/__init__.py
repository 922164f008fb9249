"""The grading service: ``kbx serve``. A thin layer of HTTP over the executor and the store."""
