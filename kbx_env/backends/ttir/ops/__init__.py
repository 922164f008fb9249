"""The handlers of TTIR operations; importing a module registers its handlers."""
