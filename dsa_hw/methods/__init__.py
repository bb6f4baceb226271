"""Methods that choose keep ratios under limits, behind one interface."""
