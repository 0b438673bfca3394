"""What can be done about a step that does not fit, each as a function of its trace."""
