"""The store of all runs, and the profiles and tables read from it."""
