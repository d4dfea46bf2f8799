"""Reports to look at: a document about a graph on its devices, the page that shows it, and traces of runs."""
